"""Workers that may die and come back."""
