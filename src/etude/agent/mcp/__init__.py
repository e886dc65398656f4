"""Tool servers: programs that lend tools by the Model Context Protocol."""
