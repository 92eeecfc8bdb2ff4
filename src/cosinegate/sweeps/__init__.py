"""Many runs: the jobs of a sweep, their progress, and search."""
