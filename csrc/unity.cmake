# Most of what it takes to compile a source here are the headers of the standard library and of pybind11, and templates that
# the next source needs as well. So the sources of a folder are compiled as one, which takes half of the time in all. What
# that asks for: names in anonymous namespaces differ within a folder. HOROVOD_UNITY=OFF compiles them one by one; so does
# tests/extended/native/test_aarch64.py, where a source that lacks an include fails.
function(compile_folders_as_one target)
  if(NOT HOROVOD_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source ${ARGN})
    get_filename_component(folder ${source} DIRECTORY)
    file(RELATIVE_PATH folder ${CMAKE_CURRENT_SOURCE_DIR} ${folder})
    if(NOT folder STREQUAL "kernels")  # each source has flags of its own
      string(REPLACE "/" "_" group ${folder})
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
endfunction()
