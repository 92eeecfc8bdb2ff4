"""Gates that ignore the image: controls for every claim about routing."""
