"""From a config to a run that starts or resumes, and to a trained network that is loaded."""
