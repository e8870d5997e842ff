"""What every HTTP server here shares: requests, who may ask, limits, static files, stopping."""
