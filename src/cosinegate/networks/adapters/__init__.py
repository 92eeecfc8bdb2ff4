"""The parts of other libraries' blocks. A library's file is imported once a model has a block of that library."""
