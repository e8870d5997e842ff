"""Workers with weights of their own, which exchange them with some of the others."""
