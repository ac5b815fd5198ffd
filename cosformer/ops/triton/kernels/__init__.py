"""The kernels. Only functions and other kernels import them: they load Triton."""
