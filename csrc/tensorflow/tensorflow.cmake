# TensorFlow's operations, a library of its own that is linked to neither TensorFlow nor the engine: TensorFlow loads it,
# and Python gives it the engine's table of functions (clients/horovod/tensorflow/library.py). It has the folder xla in it.
file(GLOB tensorflow_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc ${CMAKE_CURRENT_SOURCE_DIR}/xla/*.cc)
add_library(horovod_tensorflow MODULE ${tensorflow_sources})
compile_folders_as_one(horovod_tensorflow ${tensorflow_sources})
target_include_directories(horovod_tensorflow PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(horovod_tensorflow PRIVATE -Wall -Wextra)
if(HOROVOD_WERROR)
  target_compile_options(horovod_tensorflow PRIVATE -Werror)
endif()
target_link_libraries(horovod_tensorflow PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
sanitize(horovod_tensorflow PRIVATE)
install(TARGETS horovod_tensorflow LIBRARY DESTINATION horovod)
