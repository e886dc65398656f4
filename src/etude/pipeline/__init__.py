"""The main job: recipe to steps to report; run folders and resume."""
