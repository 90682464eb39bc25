"""Where the time goes, and what would help: measuring, models, the simulator and the planner."""
