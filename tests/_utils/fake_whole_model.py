"""TEST DOUBLE of a model of others that is not decoupled: one response a request, `max_tokens` required, nothing counted."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def first(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]

        text = first("text_input") * int(first("max_tokens"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([[text]], dtype=np.object_))])
