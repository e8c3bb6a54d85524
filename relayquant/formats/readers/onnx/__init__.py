"""ONNX reader: a model file -> a float Relax module.

file, model           the file, and the conversion of its nodes in order
inputs, fixed_sizes, bodies, functions, halves, rewrite
                      the graph before that: sizes, functions, operators on integers
frontend, inference   TVM's frontend and the checks of the onnx package, as `model` calls them
operators             the table of operators that are converted here; all other modules are
                      families of these, or what families share: sizes, symbolic, fold, steps
"""
