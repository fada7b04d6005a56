"""Commands for people: one file each, thin. They read options, call the rooms below and print."""
