# JAX's calls under jax.jit, a library of its own that is linked to neither JAX nor the engine: Python loads it and gives
# it the engine's table of functions (clients/horovod/jax/library.py). It has the folder xla in it.
file(GLOB jax_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc ${CMAKE_CURRENT_SOURCE_DIR}/xla/*.cc)
add_library(horovod_jax MODULE ${jax_sources})
compile_folders_as_one(horovod_jax ${jax_sources})
target_include_directories(horovod_jax PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(horovod_jax PRIVATE -Wall -Wextra)
if(HOROVOD_WERROR)
  target_compile_options(horovod_jax PRIVATE -Werror)
endif()
sanitize(horovod_jax PRIVATE)
install(TARGETS horovod_jax LIBRARY DESTINATION horovod)
