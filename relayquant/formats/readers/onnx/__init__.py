"""ONNX reader: a model file -> a float Relax module.

graph         the ONNX graph: its file, its checks, and what is changed or computed in it before a
              node is converted
operators     operators that are converted here and not by TVM's frontend: one module per family,
              and `table`
foreign       the same for operators that are not ONNX's
model         the conversion of a graph, node by node
control_flow  the bodies of If, Loop and Scan
"""
