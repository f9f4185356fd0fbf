"""What carries out a step."""
