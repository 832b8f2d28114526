"""The paper's experiments in the simulator, beside what its authors published."""
