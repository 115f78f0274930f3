from kbf.export import (
    onnx_filter as onnx_filter,
    onnx_linalg as onnx_linalg,
    step as step,
)
