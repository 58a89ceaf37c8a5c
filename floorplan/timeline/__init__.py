"""Every storage of a step, in time; its pictures and exports."""
