"""Workers with weights of their own, which exchange them over slow links."""
