from kbf.export import (
    numpy_columns as numpy_columns,
    onnx_filter as onnx_filter,
    onnx_linalg as onnx_linalg,
    onnx_scalars as onnx_scalars,
    step as step,
)
