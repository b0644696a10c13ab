"""The demo's jobs, their data and its idle nodes: four real networks and a trace of nodes that come and go."""
