"""Gates that do not look at the image: controls for every claim about routing."""
