"""What a card can do at most, and what that makes possible."""
