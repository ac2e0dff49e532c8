# Compile flags of csrc/kernels, file by file. Included by csrc/CMakeLists.txt, which has the target horovod_engine.
#
# Contraction to fused multiply-add stays off everywhere: all variants must give the same bits. A variant that gets no
# flags here (another CPU, an old compiler) compiles to an empty table.
include(CheckCXXCompilerFlag)

file(GLOB kernel_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set(avx2_flags -mavx2 -mfma -mf16c)
  set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
  foreach(variant avx2 avx512)
    string(REPLACE ";" " " flags "${${variant}_flags}")
    string(TOUPPER HOROVOD_HAS_${variant} known)
    check_cxx_compiler_flag("${flags}" ${known})
    if(${known})
      set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/variant_${variant}.cc
        APPEND PROPERTY COMPILE_OPTIONS ${${variant}_flags})
    endif()
  endforeach()
endif()
