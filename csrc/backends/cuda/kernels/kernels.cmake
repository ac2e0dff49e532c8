# Puts the text of the kernel into horovod_engine; included by csrc/CMakeLists.txt. It is compiled at run time.
set(HOROVOD_KERNEL_SOURCES ${CMAKE_CURRENT_BINARY_DIR}/cuda_kernel_sources.cc)
foreach(extension cu h)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/copy_spans.${extension})
endforeach()
file(READ ${CMAKE_CURRENT_LIST_DIR}/copy_spans.cu HOROVOD_COPY_SPANS_SOURCE)
file(READ ${CMAKE_CURRENT_LIST_DIR}/copy_spans.h HOROVOD_COPY_SPANS_HEADER)
configure_file(${CMAKE_CURRENT_LIST_DIR}/sources.cc.in ${HOROVOD_KERNEL_SOURCES} @ONLY)
target_sources(horovod_engine PRIVATE ${HOROVOD_KERNEL_SOURCES})
