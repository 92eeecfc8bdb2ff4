"""What a trained network costs when it runs."""
