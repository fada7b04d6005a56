"""Adapters for engines that are not ours, each used when it can be imported and named as missing otherwise."""
