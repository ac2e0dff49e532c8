# What the compiler and the linker do against errors in memory, in everything that is loaded into a user's process. Included
# before the targets. tests/packaging/test_hardening.py looks for it in what was built.
#
#   stack protector   a function whose buffer was written past its end does not return to where an attacker likes
#   FORTIFY           calls of libc with a buffer of known size are checked against it; needs optimization
#   RELRO, BIND_NOW   addresses of functions are read-only once the library is loaded
if(NOT HOROVOD_SANITIZE)  # a sanitizer sees more, and does not see calls that FORTIFY has replaced
  add_compile_options(-fstack-protector-strong)
  foreach(optimized Release RelWithDebInfo MinSizeRel)
    add_compile_options($<$<CONFIG:${optimized}>:-U_FORTIFY_SOURCE> $<$<CONFIG:${optimized}>:-D_FORTIFY_SOURCE=2>)
  endforeach()
  add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
endif()
