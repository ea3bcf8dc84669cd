# Memory and cores are not bound: loading 400 GB and more takes all of them.
bind=()
