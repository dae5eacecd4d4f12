"""What a directory holds, and whether it is what it says."""
