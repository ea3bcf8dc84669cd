"""TEST DOUBLE of TensorRT-LLM's LLM-API model: no batch dimension, and streams that repeat the text so far."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        count = int(pb_utils.get_input_tensor_by_name(request, "sampling_param_max_tokens").as_numpy()[0])
        streaming = pb_utils.get_input_tensor_by_name(request, "streaming")
        words = [f"{prompt}{number} " for number in range(count)]
        texts = (
            [words[: end + 1] for end in range(count)] if streaming is not None and streaming.as_numpy()[0] else [words]
        )
        for text in texts:
            tensor = pb_utils.Tensor("text_output", np.array(["".join(text).encode()], dtype=np.object_))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
