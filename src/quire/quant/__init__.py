"""L2: weight formats. A scheme loads or creates; a QWeight knows rows, columns and how to be packed."""
