"""Jobs about finished runs and artifacts; they run nothing and load no target."""
