"""Sessions in formats that others read. What is read here is a finished record; nothing is
sampled, run or changed."""
