"""The CPU's own kernels: C++ behind one compiled module, each with a face that takes torch tensors. See docs/cpu.md.

`native` tells whether the module was built and holds the switches (threads, instruction set); `linear`, `attention`,
`rows` and `sampling` are the faces. A face checks nothing: what a caller may pass is the operation's contract.
"""
