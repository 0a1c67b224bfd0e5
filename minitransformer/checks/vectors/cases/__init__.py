"""What is asked of each operation: questions without answers."""
