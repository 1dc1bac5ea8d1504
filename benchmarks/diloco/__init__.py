"""DiLoCo: sites that train separately and average their parameters now and then."""
