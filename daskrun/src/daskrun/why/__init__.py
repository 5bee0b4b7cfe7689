"""Why a job does not go on, or has ended: look at its processes, and say what that means."""
