// TensorFlow's end of an asynchronous kernel, which is called once when the kernel's outputs are there.
//
// It is a std::function<void()> on the stack of TensorFlow, whose address the C API hands out. The C API can call it
// but not copy it, and a kernel that ends later needs a copy. TensorFlow is compiled with GNU's C++ library, where we
// may be compiled with another one (the wheels: LLVM's), whose std::function is made otherwise. So GNU's is written out
// here: std_function.h of libstdc++, the same since GCC 4.5 as part of its ABI. load_tf() refuses a TensorFlow with
// another.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

struct TF_AsyncOpKernelDoneCallback;

namespace horovod::tensorflow {

class Done {
 public:
  Done() = default;
  explicit Done(const TF_AsyncOpKernelDoneCallback* given) {
    Function from;
    std::memcpy(&from, given, sizeof(from));
    if (!from.manage) return;
    from.manage(&function_, given, kClone);  // the captured values are the first member, at the same address
    function_.manage = from.manage;
    function_.call = from.call;
  }
  Done(Done&& other) noexcept : function_(std::exchange(other.function_, {})) {}
  Done& operator=(Done&& other) noexcept {
    std::swap(function_, other.function_);
    return *this;
  }
  ~Done() {
    if (function_.manage) function_.manage(&function_, &function_, kDestroy);
  }

  void operator()() const { function_.call(&function_); }

 private:
  enum Operation : int { kClone = 2, kDestroy = 3 };

  struct Function {
    // Small values that may be copied byte by byte, or a pointer to others: so it may be moved byte by byte.
    alignas(void*) std::byte captured[2 * sizeof(void*)];
    bool (*manage)(void* to, const void* from, Operation);  // null: there is no function
    void (*call)(const void* captured);
  };

  Function function_{};
};

}  // namespace horovod::tensorflow
