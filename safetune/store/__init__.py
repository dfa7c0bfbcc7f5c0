"""Where outcomes and choices are kept. Imports neither torch nor triton."""
