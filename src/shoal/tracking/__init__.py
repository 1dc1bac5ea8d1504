"""What a run leaves behind: metrics files, external trackers, plots and the final report."""
