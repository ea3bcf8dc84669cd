"""`lint`: what is wrong with anyone's LLM arguments, checkpoint or Triton repository, before a GPU is held."""
