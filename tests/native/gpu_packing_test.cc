// How small tensors of a GPU are packed: which, where to, by what copies, and for how long the memory is used.
#include <array>
#include <cstdlib>
#include <cstring>
#include <random>

#include "backends/cuda/compiler.h"
#include "backends/cuda/copier.h"
#include "backends/cuda/kernels/copy_spans.h"
#include "backends/nccl/packing.h"
#include "gpu_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;
using nccl::PackLayout;

namespace {

// -- which tensors, and where -----------------------------------------------------------------------------------------

constexpr nccl::PackRule kRule{1000, 3, 1 << 20};
constexpr int64_t kStays = PackLayout::kStays;

std::vector<nccl::TensorSize> floats(const std::vector<size_t>& bytes) {
  std::vector<nccl::TensorSize> sizes;
  for (const size_t one : bytes) sizes.push_back({DType::float32, one});
  return sizes;
}

void small_tensors_are_packed_and_the_others_stay() {
  const PackLayout layout = PackLayout::of(floats({4, 1000, 1004, 0, 40, 16}), kRule);
  CHECK((layout.offsets == std::vector<int64_t>{0, 16, kStays, kStays, 1024, 1072}));
  CHECK(layout.bytes == 1088 && layout.parts.size() == 1);
  CHECK(layout.parts[0].offset == 0 && layout.parts[0].bytes == 1088);
}

void too_few_are_not_packed() {
  CHECK(PackLayout::of(floats({4, 2000, 8, 0}), kRule).parts.empty());
  CHECK(PackLayout::of(floats({4, 8, 12}), kRule).parts.size() == 1);
  CHECK(PackLayout::of(floats({4}), {1000, 1, 1 << 20}).parts.size() == 1);
}

void a_threshold_of_0_packs_nothing() {
  CHECK(PackLayout::of(floats({4, 0, 8, 12}), {0, 1, 1 << 20}).parts.empty());
  CHECK(PackLayout::of(floats({4, 0, 8, 12}), {1000, 1, 0}).parts.empty());  // fusion is off
  CHECK(PackLayout::of({}, {1000, 0, 1 << 20}).parts.empty());
}

void what_has_no_room_stays() {
  const PackLayout layout = PackLayout::of(floats({480, 480, 480, 32}), {1000, 3, 1024});
  CHECK((layout.offsets == std::vector<int64_t>{0, 480, kStays, 960}));
}

void each_dtype_has_a_part_of_its_own() {
  std::vector<nccl::TensorSize> sizes;
  for (int i = 0; i < 9; ++i) {
    constexpr DType kinds[] = {DType::float16, DType::int64, DType::float16};
    sizes.push_back({kinds[i % 3], static_cast<size_t>(8 * (i + 1))});
  }
  sizes.push_back({DType::uint8, 5});  // the only tensor of its dtype
  const PackLayout layout = PackLayout::of(sizes, kRule);
  CHECK(layout.parts.size() == 2 && layout.offsets[9] == kStays);
  CHECK(layout.parts[0].dtype == DType::float16 && layout.parts[1].dtype == DType::int64);
  CHECK(layout.parts[1].offset == layout.parts[0].bytes &&
        layout.offsets[1] == static_cast<int64_t>(layout.parts[1].offset));
  for (const int64_t offset : layout.offsets) CHECK(offset == kStays || offset % 16 == 0);
}

// -- copies -----------------------------------------------------------------------------------------------------------

struct Told {
  std::vector<std::string> sentences;
  std::function<void(const std::string&)> take() {
    return [this](const std::string& sentence) { sentences.push_back(sentence); };
  }
};

std::vector<uint8_t> random_bytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& one : bytes) one = static_cast<uint8_t>(random());
  return bytes;
}

// Copies spans (from, to, bytes) between two arrays on the device, and compares all of the second one with what the
// host makes of it: what lies between spans must not change.
void compare(Gpu& gpu, cuda::Copier& copier, const std::vector<std::array<size_t, 3>>& spans, size_t size) {
  const std::vector<uint8_t> source = random_bytes(size, 1), before = random_bytes(size, 2);
  const OutputBuffer from = gpu.make(source), to = gpu.make(before);
  std::vector<uint8_t> expected = before;
  std::vector<cuda::Copy> copies;
  for (const auto& [begin, end, bytes] : spans) {
    copies.push_back({from.data.get() + begin, to.data.get() + end, bytes});
    std::copy_n(source.begin() + static_cast<ptrdiff_t>(begin), bytes, expected.begin() + static_cast<ptrdiff_t>(end));
  }
  CHECK_OK(copier.copy(copies, *gpu.stream));
  gpu.synchronize();
  CHECK(values_of<uint8_t>(to) == expected);
}

void in_both_ways(void (*body)(Gpu&, cuda::Copier&)) {
  for (const bool kernel : {true, false}) {
    Gpu gpu(0);
    Told told;
    const int64_t launches = count("cuda", "launches"), copies = count("cuda", "copies");
    {
      cuda::Copier copier(gpu.device, kernel, kNvrtcFile, told.take());
      body(gpu, copier);
      CHECK(count("cuda", "modules") == (kernel ? 1 : 0));
    }
    CHECK(told.sentences.empty() && count("cuda", "modules") == 0);
    CHECK((count("cuda", "launches") > launches) == kernel && (count("cuda", "copies") > copies) == !kernel);
  }
}

void every_alignment_and_length() {
  in_both_ways([](Gpu& gpu, cuda::Copier& copier) {
    std::vector<std::array<size_t, 3>> spans;
    size_t at = 0;
    for (size_t from = 0; from < 16; ++from) {
      for (size_t to = 0; to < 16; to += from % 4 == 0 ? 4 : 5) {
        for (const size_t bytes : {0, 1, 2, 3, 7, 15, 16, 17, 64, 99}) {
          spans.push_back({at + from, at + to, bytes});
          at += 128;
        }
      }
    }
    CHECK(spans.size() > 2 * cuda::kTableSpans);
    compare(gpu, copier, spans, at);
  });
}

void uneven_sizes_of_several_blocks() {
  in_both_ways([](Gpu& gpu, cuda::Copier& copier) {
    std::vector<std::array<size_t, 3>> spans;
    size_t at = 1;
    for (const size_t bytes : {size_t{1}, size_t{cuda::kChunkBytes}, size_t{cuda::kChunkBytes} + 1, size_t{3},
                               size_t{100'000}, size_t{cuda::kChunkBytes} - 1, 2 * size_t{cuda::kChunkBytes}}) {
      spans.push_back({at, at + 15, bytes});
      at += bytes + 7;
    }
    compare(gpu, copier, spans, at + 16);
  });
}

void exactly_one_full_table_and_one_more() {
  for (const size_t number : {size_t{cuda::kTableSpans}, size_t{cuda::kTableSpans} + 1}) {
    Gpu gpu(0);
    Told told;
    cuda::Copier copier(gpu.device, true, kNvrtcFile, told.take());
    std::vector<std::array<size_t, 3>> spans;
    for (size_t i = 0; i < number; ++i) spans.push_back({i * 32, i * 32, 20});
    const int64_t launches = count("cuda", "launches");
    compare(gpu, copier, spans, number * 32);
    CHECK(count("cuda", "launches") == launches + (number > cuda::kTableSpans ? 2 : 1));
  }
}

void nothing_is_launched_for_nothing() {
  Gpu gpu(0);
  Told told;
  cuda::Copier copier(gpu.device, true, kNvrtcFile, told.take());
  const int64_t launches = count("cuda", "launches");
  compare(gpu, copier, {{3, 5, 0}}, 64);
  compare(gpu, copier, {}, 64);
  CHECK(count("cuda", "launches") == launches);
}

void expect_copies_and_one_sentence(const std::string& file, const std::string& why) {
  Gpu gpu(0);
  Told told;
  const int64_t launches = count("cuda", "launches"), copies = count("cuda", "copies");
  {
    cuda::Copier copier(gpu.device, true, file, told.take());
    for (int i = 0; i < 3; ++i) compare(gpu, copier, {{0, 1, 9}, {20, 30, 33}}, 64);
  }
  CHECK(count("cuda", "launches") == launches && count("cuda", "copies") == copies + 6);
  CHECK(told.sentences.size() == 1);
  CHECK(contains(told.sentences[0], "GPU 0") && contains(told.sentences[0], why));
  CHECK(!has_code(told.sentences[0]), "it is no error");
  CHECK(count("cuda", "modules") == 0);
}

void without_a_compiler_they_are_copied_one_by_one() {
  expect_copies_and_one_sentence("/nowhere/libnvrtc.so.12", "(/nowhere/libnvrtc.so.12: ");
  expect_copies_and_one_sentence("/nowhere/libnvrtc.so.12", "HOROVOD_NVRTC_LIBRARY");
  expect_copies_and_one_sentence("libm.so.6", "nvrtcGetNumSupportedArchs");
}

// A path of its own, since what a file compiles to is remembered.
std::string another_path() { return STANDIN_FOLDER "/././libstandin_nvrtc.so"; }

void a_kernel_that_does_not_compile_is_told() {
  plan_fault("nvrtc", "nvrtcCompileProgram", 6);
  expect_copies_and_one_sentence(
      another_path(),
      "failed in nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6). It says: copy_spans.cu(1): "
      "error: said by the stand-in");
  expect_copies_and_one_sentence(another_path(), "said by the stand-in");  // is not tried again
}

void a_kernel_that_does_not_load_is_told() {
  plan_fault("cuda", "cuModuleLoadData", 209);
  expect_copies_and_one_sentence(kNvrtcFile, "CUDA_ERROR_NO_BINARY_FOR_GPU (209");
  plan_fault("cuda", "cuModuleGetFunction", 500);
  expect_copies_and_one_sentence(kNvrtcFile, "CUDA_ERROR_NOT_FOUND (500");
}

void other_devices_get_what_the_compiler_knows() {
  Status status;
  const auto begin = [&](int capability) {
    const cuda::CopyKernel* kernel = cuda::copy_kernel(kNvrtcFile, capability, status);
    return kernel ? kernel->image.substr(0, kernel->image.find('\n')) : std::string();
  };
  CHECK(begin(80) == "cubin 80" && begin(90) == "cubin 90");
  CHECK(begin(89) == "ptx 80" && begin(120) == "ptx 90");
  CHECK(begin(61).empty());
  CHECK(ends_with(status, error_code::missing_library, "6.1"));
  setenv("STANDIN_CUDA_CAPABILITY", "103", 1);
  in_both_ways([](Gpu& gpu, cuda::Copier& copier) { compare(gpu, copier, {{1, 2, 30}}, 64); });
  unsetenv("STANDIN_CUDA_CAPABILITY");
}

// -- how long ---------------------------------------------------------------------------------------------------------

void a_buffer_that_grows_is_given_back_when_the_stream_has_come_there() {
  Gpu gpu(0);
  const auto all_are = [](int64_t blocks) { return count("cuda", "blocks") == blocks; };
  CHECK(eventually([&] { return all_are(0); }));  // of other tests
  {
    nccl::PackBuffer buffer;
    CHECK_OK(buffer.reserve(100, 1 << 20, gpu.stream));
    const std::byte* const first = buffer.data();
    CHECK_OK(buffer.reserve(60'000, 1 << 20, gpu.stream));
    CHECK(buffer.data() == first);
    void* held = gpu.hold();  // somebody still reads it
    CHECK_OK(buffer.reserve(70'000, 1 << 20, gpu.stream));
    CHECK(all_are(2));
    Gpu::release(held);
    CHECK(eventually([&] { return all_are(1); }));
    CHECK_OK(buffer.reserve(300'000, 400'000, gpu.stream));  // no more than is allowed
    gpu.synchronize();
    std::memset(buffer.data(), 1, 400'000);
    CHECK_OK(buffer.reserve(400'000, 400'000, gpu.stream));
    CHECK(all_are(1));
  }
  CHECK(eventually([&] { return all_are(0); }));
}

void a_kernel_that_may_still_run_stays_loaded() {
  Gpu gpu(0);
  Told told;
  const OutputBuffer data = gpu.make(std::vector<int32_t>{1, 2, 3, 4});
  void* held = gpu.hold();
  {
    cuda::Copier copier(gpu.device, true, kNvrtcFile, told.take());
    const cuda::Copy copy{data.data.get(), data.data.get() + 8, 8};
    CHECK_OK(copier.copy({&copy, 1}, *gpu.stream));
    copier.leave_loaded();
  }
  CHECK(count("cuda", "modules") == 1);
  Gpu::release(held);
  gpu.synchronize();
  CHECK((values_of<int32_t>(data) == std::vector<int32_t>{1, 2, 1, 2}));
}

constexpr NamedTest kTests[] = {
    {"small tensors are packed and the others stay", small_tensors_are_packed_and_the_others_stay},
    {"too few are not packed", too_few_are_not_packed},
    {"a threshold of 0 packs nothing", a_threshold_of_0_packs_nothing},
    {"what has no room stays", what_has_no_room_stays},
    {"each dtype has a part of its own", each_dtype_has_a_part_of_its_own},
    {"every alignment and length", every_alignment_and_length},
    {"uneven sizes of several blocks", uneven_sizes_of_several_blocks},
    {"exactly one full table, and one more", exactly_one_full_table_and_one_more},
    {"nothing is launched for nothing", nothing_is_launched_for_nothing},
    {"without a compiler they are copied one by one", without_a_compiler_they_are_copied_one_by_one},
    {"a kernel that does not compile is told", a_kernel_that_does_not_compile_is_told},
    {"a kernel that does not load is told", a_kernel_that_does_not_load_is_told},
    {"other devices get what the compiler knows", other_devices_get_what_the_compiler_knows},
    {"a buffer that grows is given back when the stream has come there",
     a_buffer_that_grows_is_given_back_when_the_stream_has_come_there},
    {"a kernel that may still run stays loaded", a_kernel_that_may_still_run_stays_loaded},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
