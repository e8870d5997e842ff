"""Workers that may die and come back: who is there, and how they reach each other."""
