"""Jobs about what is finished already; nothing is run and no target is loaded."""
