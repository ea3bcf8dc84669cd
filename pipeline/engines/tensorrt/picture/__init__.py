"""A network as a picture: `blocks.py` says what is drawn, `layout.py` where, `svg.py` and `dot.py` how."""
