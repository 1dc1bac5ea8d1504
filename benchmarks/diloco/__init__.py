"""DiLoCo: sites that train apart and average now and then."""
