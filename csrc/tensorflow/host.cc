#include "tensorflow/host.h"

#include "tensorflow/tf_api.h"

namespace horovod::tensorflow {

const HorovodApi* engine_api = nullptr;
Ask ask_python = nullptr;

Answer ask(Question question, int64_t process_set_id) {
  char sentence[1024] = "";
  Answer answer;
  answer.code = ask_python(static_cast<int32_t>(question), process_set_id, &answer.number, sentence, sizeof(sentence));
  answer.sentence = sentence;
  return answer;
}

int tf_code(int32_t engine_code) {
  switch (engine_code) {
    case HOROVOD_OK:
      return kTfOk;
    case HOROVOD_INVALID_ARGUMENT:
      return kTfInvalidArgument;
    case HOROVOD_PRECONDITION:
      return kTfFailedPrecondition;
    default:
      return kTfUnknown;
  }
}

}  // namespace horovod::tensorflow
