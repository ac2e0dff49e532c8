// An error's code: what kind of fault it is, as a word that programs, tests and the documentation name. The words and
// their meanings are those of base/errors in Python, which a test compares with these.
//
// The code stands behind the sentence, in square brackets. All of this runs only where an error is made.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace horovod {

struct ErrorCode {
  std::string_view word;
};

namespace error_code {

inline constexpr ErrorCode cleared_handle{"cleared-handle"};
inline constexpr ErrorCode forked_child{"forked-child"};
inline constexpr ErrorCode gloo_failed{"gloo-failed"};
inline constexpr ErrorCode gpu_failed{"gpu-failed"};
inline constexpr ErrorCode gpu_stalled{"gpu-stalled"};
inline constexpr ErrorCode graph_capture{"graph-capture"};
inline constexpr ErrorCode internal{"internal"};
inline constexpr ErrorCode interrupted{"interrupted"};
inline constexpr ErrorCode invalid_operation{"invalid-operation"};
inline constexpr ErrorCode invalid_root{"invalid-root"};
inline constexpr ErrorCode invalid_setting{"invalid-setting"};
inline constexpr ErrorCode missing_library{"missing-library"};
inline constexpr ErrorCode moved_tensor{"moved-tensor"};
inline constexpr ErrorCode name_in_flight{"name-in-flight"};
inline constexpr ErrorCode nccl_failed{"nccl-failed"};
inline constexpr ErrorCode no_gpu{"no-gpu"};
inline constexpr ErrorCode no_nccl{"no-nccl"};
inline constexpr ErrorCode no_progress{"no-progress"};
inline constexpr ErrorCode no_rows{"no-rows"};
inline constexpr ErrorCode no_such_process_set{"no-such-process-set"};
inline constexpr ErrorCode not_in_process_set{"not-in-process-set"};
inline constexpr ErrorCode not_with_join{"not-with-join"};
inline constexpr ErrorCode out_of_memory{"out-of-memory"};
inline constexpr ErrorCode peer_lost{"peer-lost"};
inline constexpr ErrorCode shared_memory{"shared-memory"};
inline constexpr ErrorCode shut_down{"shut-down"};
inline constexpr ErrorCode stuck_thread{"stuck-thread"};
inline constexpr ErrorCode tampered_data{"tampered-data"};
inline constexpr ErrorCode timeline{"timeline"};
inline constexpr ErrorCode too_many_open_files{"too-many-open-files"};
inline constexpr ErrorCode undefined_reduction{"undefined-reduction"};
inline constexpr ErrorCode unexpected_data{"unexpected-data"};
inline constexpr ErrorCode wrong_gpu{"wrong-gpu"};
inline constexpr ErrorCode wrong_splits{"wrong-splits"};
inline constexpr ErrorCode wrong_tensor{"wrong-tensor"};

}  // namespace error_code

// Where the code of a text begins, with the space before it; npos where it has none. Codes that only Python has count
// too, so this goes by their form.
inline size_t place_of_code(std::string_view text) {
  if (text.empty() || text.back() != ']') return std::string_view::npos;
  const size_t place = text.rfind(" [");
  if (place == std::string_view::npos) return place;
  const std::string_view word = text.substr(place + 2, text.size() - place - 3);
  const bool is_word = !word.empty() && word.front() >= 'a' && word.front() <= 'z' &&
                       word.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string_view::npos;
  return is_word ? place : std::string_view::npos;
}

inline bool has_code(std::string_view text) { return place_of_code(text) != std::string_view::npos; }

// The sentence alone, for another sentence that holds it.
inline std::string without_code(std::string_view text) { return std::string(text.substr(0, place_of_code(text))); }

// With its first letter in upper case: for a sentence that begins with the label of a rank ("rank 1 (pid 42) on host
// h1").
inline std::string capitalized(std::string text) {
  if (!text.empty() && text.front() >= 'a' && text.front() <= 'z')
    text.front() = static_cast<char>(text.front() - 'a' + 'A');
  return text;
}

// The sentence with the code behind it. The sentence of another error that it ends with loses its own code.
inline std::string coded(ErrorCode code, std::string_view sentence) {
  return without_code(sentence).append(" [").append(code.word).append("]");
}

// An error's text with one more sentence before its code.
inline std::string with_more(std::string text, std::string_view more) {
  const size_t place = place_of_code(text);
  return text.insert(place == std::string::npos ? text.size() : place, more);
}

// An error's text in at most so many bytes: the sentence is cut off, and the code stays.
inline std::string shortened(std::string text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  const size_t place = place_of_code(text);
  const size_t code_bytes = place == std::string::npos ? 0 : text.size() - place;
  if (code_bytes > most_bytes) return text.substr(0, most_bytes);
  return text.substr(0, most_bytes - code_bytes) + text.substr(text.size() - code_bytes);
}

}  // namespace horovod
