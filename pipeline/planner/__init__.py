"""What fits where: exact parameter and memory arithmetic, the choices that follow, and what cannot work. No torch."""
