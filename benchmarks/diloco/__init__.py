"""DiLoCo: sites train separately and average their parameters from time to time."""
