"""Tools that help users decide: analysis, simulator, planner, benchmark, injected faults. The service imports none."""
