# What stands in for libcuda.so.1, libnccl.so.2 and libnvrtc.so on hosts without a GPU: libraries that tests name to the
# loader. They share nothing with the engine but the text of its kernel, which runs in the first of them.
set(standin_folder ${CMAKE_CURRENT_LIST_DIR})
function(add_standin name)
  list(TRANSFORM ARGN PREPEND ${standin_folder}/)
  add_library(${name} SHARED EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${programs_folder})
  # Thread-local variables in the static block: ThreadSanitizer takes the loader's own handling of others for a race.
  target_compile_options(${name} PRIVATE -Wall -Wextra -g -O1 -ftls-model=initial-exec)
  if(HOROVOD_WERROR)
    target_compile_options(${name} PRIVATE -Werror)
  endif()
  if(HOROVOD_SANITIZE AND NOT HOROVOD_LIBFUZZER)
    target_compile_options(${name} PRIVATE -fsanitize=${HOROVOD_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${HOROVOD_SANITIZE})
  endif()
  target_link_libraries(${name} PRIVATE Threads::Threads)
endfunction()

add_standin(standin_cuda standin_cuda.cc standin_streams.cc standin_memory.cc standin_modules.cc)
target_include_directories(standin_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
set_source_files_properties(${standin_folder}/standin_modules.cc PROPERTIES
  COMPILE_OPTIONS "-Wno-unknown-pragmas;-fno-strict-aliasing"  # a kernel moves words, whatever they are
  COMPILE_DEFINITIONS STANDIN_KERNELS="${CMAKE_CURRENT_SOURCE_DIR}/backends/cuda/kernels"
  OBJECT_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/backends/cuda/kernels/copy_spans.cu)
add_standin(standin_nvrtc standin_nvrtc.cc)
add_standin(standin_nccl standin_nccl.cc standin_nccl_comms.cc hub.cc)
add_dependencies(standin_nccl standin_nvrtc)  # so that whoever builds this one has all
target_link_libraries(standin_nccl PRIVATE standin_cuda)
# The one beside it, whatever the folder is called: the linker takes no path with a comma in it.
set_target_properties(standin_nccl PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "\$ORIGIN")
